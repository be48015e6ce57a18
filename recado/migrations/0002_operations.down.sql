DROP TABLE {schema}.operations;
